// Takes rows of float32 tokens; gives the recurrence, turns and moments of blocked.py, each in one pass per row.
//
// Plain C interface: pointers, row strides in elements, thread count. Inner stride is 1. A result never depends on the
// number of threads, nor on inactive columns behind a row's last active one (padding), bit for bit: sums run in double
// over eight lanes, a lane by column modulo 8. Vectors are the compiler's own (GNU vector extension), so no instruction
// set is named here, and no branch depends on a single mask value.

#include <algorithm>
#include <cstdint>
#include <thread>
#include <vector>

typedef float f4 __attribute__((vector_size(16)));
typedef int32_t i4 __attribute__((vector_size(16)));
typedef double d4 __attribute__((vector_size(32)));
typedef float f8 __attribute__((vector_size(32)));
typedef int32_t i8 __attribute__((vector_size(32)));
typedef double d8 __attribute__((vector_size(64)));
typedef int64_t l8 __attribute__((vector_size(64)));
// the same, at any address
typedef float f4u __attribute__((vector_size(16), aligned(4)));
typedef float f8u __attribute__((vector_size(32), aligned(4)));
typedef int64_t l4u __attribute__((vector_size(32), aligned(4)));
typedef int64_t l8u __attribute__((vector_size(64), aligned(8)));

namespace {

// Work below this many entries a thread costs less than starting the thread.
constexpr int64_t ENTRIES_PER_THREAD = 1 << 18;

// body(first, last) over [0, rows), in contiguous shares of whole `step`s of rows.
template <class Body> void over_rows(int64_t rows, int64_t columns, int64_t step, int threads, const Body& body) {
    const int64_t steps = (rows + step - 1) / step;
    int64_t shares = std::min<int64_t>(threads, rows * columns / ENTRIES_PER_THREAD);
    shares = std::max<int64_t>(1, std::min(shares, steps));
    auto start = [&](int64_t share) { return std::min(rows, steps * share / shares * step); };
    std::vector<std::thread> others;
    for (int64_t share = 1; share < shares; ++share)
        others.emplace_back([&, share] { body(start(share), start(share + 1)); });
    body(0, start(1));
    for (std::thread& other : others) other.join();
}

inline void transpose(f4& a, f4& b, f4& c, f4& d) {
    const f4 ab = __builtin_shuffle(a, b, i4{0, 4, 1, 5}), ba = __builtin_shuffle(a, b, i4{2, 6, 3, 7});
    const f4 cd = __builtin_shuffle(c, d, i4{0, 4, 1, 5}), dc = __builtin_shuffle(c, d, i4{2, 6, 3, 7});
    a = __builtin_shuffle(ab, cd, i4{0, 1, 4, 5}), b = __builtin_shuffle(ab, cd, i4{2, 3, 6, 7});
    c = __builtin_shuffle(ba, dc, i4{0, 1, 4, 5}), d = __builtin_shuffle(ba, dc, i4{2, 3, 6, 7});
}

// The largest of eight.
inline int32_t largest(i8 x) {
    i8 y = __builtin_shuffle(x, i8{4, 5, 6, 7, 0, 1, 2, 3});
    x = x > y ? x : y, y = __builtin_shuffle(x, i8{2, 3, 0, 1, 6, 7, 4, 5});
    x = x > y ? x : y, y = __builtin_shuffle(x, i8{1, 0, 3, 2, 5, 4, 7, 6});
    x = x > y ? x : y;
    return x[0];
}

// Four columns of four rows.
inline void load(const float* const* rows, int64_t t, f4* columns) {
    for (int k = 0; k < 4; ++k) columns[k] = *(const f4u*)(rows[k] + t);
    transpose(columns[0], columns[1], columns[2], columns[3]);
}

inline void store(float* const* rows, int64_t t, f4* columns) {
    transpose(columns[0], columns[1], columns[2], columns[3]);
    for (int k = 0; k < 4; ++k) *(f4u*)(rows[k] + t) = columns[k];
}

// Sums in eight lanes, as two vectors: without AVX-512 a compiler takes a wider one apart into single numbers.
struct Eight {
    d4 low = {}, high = {};
    double total() const { return ((low[0] + high[0]) + (low[2] + high[2])) + ((low[1] + high[1]) + (low[3] + high[3])); }
};

inline double total(d8 x) { return ((x[0] + x[4]) + (x[2] + x[6])) + ((x[1] + x[5]) + (x[3] + x[7])); }

// Four rows side by side, right to left: a step's delta in float, the running sum in double. A row beyond the last is
// the last one again, written twice with the same numbers.
template <bool CRITIC, bool NEXT> struct Recurrence {
    const float *rewards[4], *values[4], *steps[4];
    float *running[4], *next[4];
    f4 discount, after;
    d4 factor, run = {};

    inline f4 column(f4 reward, f4 value, f4 step) {
        const f4 delta = CRITIC ? reward + discount * after - value : reward + discount * after;
        const i4 on = step != 0.0f;
        after = on ? value : after;
        run = __builtin_convertvector(step, d4) != 0.0 ? __builtin_convertvector(delta, d4) + factor * run : run;
        return __builtin_convertvector(run, f4);
    }

    void walk(int64_t columns) {
        int64_t t = columns;
        for (; t % 4; --t) {
            f4 reward, value = {}, step;
            for (int k = 0; k < 4; ++k) {
                reward[k] = rewards[k][t - 1], step[k] = steps[k][t - 1];
                if (CRITIC) value[k] = values[k][t - 1];
            }
            const f4 out = column(reward, value, step);
            for (int k = 0; k < 4; ++k) {
                running[k][t - 1] = out[k];
                if (NEXT) next[k][t - 1] = after[k];
            }
        }
        for (t -= 4; t >= 0; t -= 4) {
            f4 reward[4], value[4] = {}, step[4], out[4], held[4];
            load(rewards, t, reward), load(steps, t, step);
            if (CRITIC) load(values, t, value);
            for (int c = 3; c >= 0; --c) out[c] = column(reward[c], value[c], step[c]), held[c] = after;
            store(running, t, out);
            if (NEXT) store(next, t, held);
        }
    }
};

// Four rows side by side, right to left, in double.
struct DiscountedSum {
    const float *x[4], *factor[4];
    float* out[4];
    d4 run = {};

    inline f4 column(f4 x, f4 factor) {
        run = __builtin_convertvector(x, d4) + __builtin_convertvector(factor, d4) * run;
        return __builtin_convertvector(run, f4);
    }

    void walk(int64_t columns) {
        int64_t t = columns;
        for (; t % 4; --t) {
            f4 number, by;
            for (int k = 0; k < 4; ++k) number[k] = x[k][t - 1], by[k] = factor[k][t - 1];
            number = column(number, by);
            for (int k = 0; k < 4; ++k) out[k][t - 1] = number[k];
        }
        for (t -= 4; t >= 0; t -= 4) {
            f4 number[4], by[4];
            load(x, t, number), load(factor, t, by);
            for (int c = 3; c >= 0; --c) number[c] = column(number[c], by[c]);
            store(out, t, number);
        }
    }
};

struct Moments {
    double n = 0, mean = 0, m2 = 0;

    // Chan, Golub, LeVeque 1983. Equal means leave mean and m2 untouched, exactly.
    void add(double n2, double mean2, double m22) {
        if (n2 <= 0) return;
        const double both = n + n2, away = mean2 - mean;
        mean += away * (n2 / both);
        m2 += m22 + away * away * (n * n2 / both);
        n = both;
    }
};

// One pass around the row's first active entry: exact zeros where all are equal.
Moments moments(const float* x, const float* mask, int64_t columns) {
    int64_t first = 0;
    while (first + 8 <= columns && !largest(*(const f8u*)(mask + first) != 0.0f ? i8{} + 1 : i8{})) first += 8;
    while (first < columns && mask[first] == 0.0f) ++first;
    if (first == columns) return {};
    const double pivot = x[first];
    Eight sum, squares, count;
    auto four = [&](f4 values, f4 active, d4 Eight::* half) {
        const d4 away = __builtin_convertvector(values, d4) - pivot, one = d4{} + 1.0;
        const auto on = __builtin_convertvector(active, d4) != 0.0;
        const d4 kept = on ? away : d4{};
        sum.*half += kept, squares.*half += kept * kept, count.*half += on ? one : d4{};
    };
    auto eight = [&](const float* values, const float* active) {
        four(*(const f4u*)values, *(const f4u*)active, &Eight::low);
        four(*(const f4u*)(values + 4), *(const f4u*)(active + 4), &Eight::high);
    };
    int64_t t = first / 8 * 8;
    for (; t + 8 <= columns; t += 8) eight(x + t, mask + t);
    if (t < columns) {
        float values[8] = {}, active[8] = {};
        for (int64_t i = 0; t + i < columns; ++i) values[i] = x[t + i], active[i] = mask[t + i];
        eight(values, active);
    }
    const double n = count.total(), s = sum.total(), away = s / n;
    return {n, pivot + away, std::max(0.0, squares.total() - s * away)};
}

// One row's turns, left to right. A turn is a run of equal ids among active columns; the id of a column stands `shift`
// columns to its right, -1 beyond the row.
struct Turns {
    struct Turn {
        float reward, value;
        int64_t last;
    };
    const float *rewards, *values, *mask;
    const int64_t* ids;
    int64_t shift, columns;
    std::vector<Turn>& found;
    int64_t id = 0, lowest = 0, highest = 0;
    bool ordered = true;
    d8 sum = {};

    // The turn ends at the last active column before t.
    void close(int64_t t) {
        if (found.empty()) return;
        while (mask[--t] == 0.0f) {}
        found.back().reward = float(total(sum)), found.back().last = t;
        sum = d8{};
    }

    void one(int64_t t) {
        if (mask[t] == 0.0f) return;
        const int64_t own = t + shift < columns ? ids[t + shift] : -1;
        if (found.empty() || own != id) {
            close(t);
            ordered &= found.empty() || own > id;
            id = own, lowest = std::min(lowest, id), highest = std::max(highest, id);
            found.push_back({0, values ? values[t] : 0, t});
        }
        if (rewards) sum[t % 8] += rewards[t];
    }

    // Thirty-two columns at once where none starts a turn, else eight, else one.
    void walk() {
        const int64_t* own = ids + shift;
        auto on = [&](int64_t t) { return __builtin_convertvector(*(const f8u*)(mask + t) != 0.0f, l8); };
        auto starts = [&](int64_t t) { return on(t) & (*(const l8u*)(own + t) != id); };
        auto bits = [&](int64_t t) { return *(const l4u*)(rewards + t); };
        auto any = [](auto x) {
            for (size_t i = 1; i < sizeof x / sizeof x[0]; ++i) x[0] |= x[i];
            return x[0] != 0;
        };
        auto add = [&](int64_t t) { sum += on(t) ? __builtin_convertvector(*(const f8u*)(rewards + t), d8) : d8{}; };
        int64_t t = 0;
        while (t < columns && found.empty()) one(t++);
        for (; t < columns && t % 8; ++t) one(t);
        for (; t + 32 + shift <= columns; t += 32) {
            const bool some = any((starts(t) | starts(t + 8)) | (starts(t + 16) | starts(t + 24)));
            if (!some && !(rewards && any((bits(t) | bits(t + 8)) | (bits(t + 16) | bits(t + 24))))) continue;
            for (int64_t at = t; at < t + 32; at += 8) {
                if (some && any(starts(at)))
                    for (int64_t i = at; i < at + 8; ++i) one(i);
                else if (rewards) add(at);
            }
        }
        for (; t < columns; ++t) one(t);
        close(columns);
    }
};

}  // namespace

extern "C" {

// values, next_out: null without. Only the first `used` columns may step; behind them the states are still the start's.
void backward_recurrence(const float* rewards, int64_t rewards_row, const float* values, int64_t values_row,
                         const float* steps, int64_t steps_row, const float* bootstrap, const double* gae_lambda,
                         double discount, float* running_out, float* next_out, int64_t rows, int64_t columns,
                         int64_t used, int threads) {
    auto four = [&](auto recurrence, int64_t first) {
        for (int k = 0; k < 4; ++k) {
            const int64_t row = std::min(first + k, rows - 1);
            recurrence.rewards[k] = rewards + row * rewards_row;
            recurrence.values[k] = values ? values + row * values_row : nullptr;
            recurrence.steps[k] = steps + row * steps_row;
            recurrence.running[k] = running_out + row * columns;
            recurrence.next[k] = next_out ? next_out + row * columns : nullptr;
            recurrence.after[k] = bootstrap[row];
            recurrence.factor[k] = discount * gae_lambda[row];
            std::fill(recurrence.running[k] + used, recurrence.running[k] + columns, 0.0f);
            if (next_out) std::fill(recurrence.next[k] + used, recurrence.next[k] + columns, bootstrap[row]);
        }
        recurrence.discount = f4{} + float(discount);
        recurrence.walk(used);
    };
    over_rows(rows, columns, 4, threads, [&](int64_t first, int64_t last) {
        for (; first < last; first += 4) {
            if (values && next_out) four(Recurrence<true, true>{}, first);
            else if (values) four(Recurrence<true, false>{}, first);
            else if (next_out) four(Recurrence<false, true>{}, first);
            else four(Recurrence<false, false>{}, first);
        }
    });
}

void row_moments(const float* x, int64_t x_row, const float* mask, int64_t mask_row, double* n, double* mean,
                    double* m2, int64_t rows, int64_t columns, int threads) {
    over_rows(rows, columns, 1, threads, [&](int64_t first, int64_t last) {
        for (int64_t row = first; row < last; ++row) {
            const Moments found = moments(x + row * x_row, mask + row * mask_row, columns);
            n[row] = found.n, mean[row] = found.mean, m2[row] = found.m2;
        }
    });
}

// Units in order; part -1 (or any other outside [0, units)) is left out. Outputs start at zero.
void merge_moments(const double* n, const double* mean, const double* m2, const int64_t* part, double* n_out,
                   double* mean_out, double* m2_out, int64_t units) {
    for (int64_t unit = 0; unit < units; ++unit) n_out[unit] = mean_out[unit] = m2_out[unit] = 0;
    for (int64_t unit = 0; unit < units; ++unit) {
        const int64_t to = part[unit];
        if (to < 0 || to >= units) continue;
        Moments sum{n_out[to], mean_out[to], m2_out[to]};
        sum.add(n[unit], mean[unit], m2[unit]);
        n_out[to] = sum.n, mean_out[to] = sum.mean, m2_out[to] = sum.m2;
    }
}

void turn_counts(const int64_t* ids, int64_t ids_row, const float* mask, int64_t mask_row, int64_t* counts,
                 bool* ordered, int64_t rows, int64_t columns, int threads) {
    over_rows(rows, columns, 1, threads, [&](int64_t first, int64_t last) {
        std::vector<Turns::Turn> found;
        for (int64_t row = first; row < last; ++row, found.clear()) {
            Turns turns{nullptr, nullptr, mask + row * mask_row, ids + row * ids_row, 0, columns, found};
            turns.walk();
            counts[row] = found.size(), ordered[row] = turns.ordered;
        }
    });
}

// values, next_out: null without. `tokens`: what every id of an active column must be below, and not below 0.
void turn_recurrence(const float* rewards, int64_t rewards_row, const float* values, int64_t values_row,
                     const int64_t* ids, int64_t ids_row, const float* mask, int64_t mask_row, const float* bootstrap,
                     const double* gae_lambda, double discount, float* running_out, float* next_out, bool* ordered,
                     bool* inside, int64_t tokens, int64_t rows, int64_t columns, int threads) {
    over_rows(rows, columns, 1, threads, [&](int64_t first, int64_t last) {
        std::vector<Turns::Turn> found;
        for (int64_t row = first; row < last; ++row, found.clear()) {
            Turns turns{rewards + row * rewards_row, values ? values + row * values_row : nullptr,
                        mask + row * mask_row, ids + row * ids_row, 1, columns, found};
            turns.walk();
            ordered[row] = turns.ordered, inside[row] = turns.lowest >= 0 && turns.highest < tokens;
            // right to left, as Recurrence: a step's delta in float, the running sum in double
            float after = bootstrap[row];
            double run = 0;
            int64_t end = columns;
            auto show = [&](int64_t from) {
                std::fill(running_out + row * columns + from, running_out + row * columns + end, float(run));
                if (next_out) std::fill(next_out + row * columns + from, next_out + row * columns + end, after);
                end = from;
            };
            for (auto turn = found.rbegin(); turn != found.rend(); ++turn) {
                show(turn->last + 1);
                const float ahead = turn->reward + float(discount) * after, delta = values ? ahead - turn->value : ahead;
                run = double(delta) + discount * gae_lambda[row] * run, after = turn->value;
            }
            show(0);
        }
    });
}

void discounted_sum(const float* x, int64_t x_row, const float* factor, int64_t factor_row, float* out, int64_t rows,
                    int64_t columns, int threads) {
    over_rows(rows, columns, 4, threads, [&](int64_t first, int64_t last) {
        for (; first < last; first += 4) {
            DiscountedSum sum;
            for (int k = 0; k < 4; ++k) {
                const int64_t row = std::min(first + k, rows - 1);
                sum.x[k] = x + row * x_row, sum.factor[k] = factor + row * factor_row, sum.out[k] = out + row * columns;
            }
            sum.walk(columns);
        }
    });
}

}  // extern "C"
