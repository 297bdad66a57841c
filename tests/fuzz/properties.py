"""Gives every property that is fuzzed, by name, and how many examples of it `make test` takes."""

from tests.fuzz.fuzz_compute import BACKENDS, fuzz_compiled, fuzz_compute, fuzz_prompts
from tests.fuzz.fuzz_config import fuzz_file, fuzz_mapping, fuzz_name
from tests.fuzz.fuzz_rollouts import fuzz_pt, fuzz_safetensors

SHORT = {
    fuzz_compute: 120,
    fuzz_prompts: 60,
    fuzz_mapping: 150,
    fuzz_file: 200,
    fuzz_name: 150,
    fuzz_safetensors: 150,
    fuzz_pt: 100,
}
# Each new kind of batch costs seconds of compiling.
LONG = (*SHORT, *([fuzz_compiled] if "compiled" in BACKENDS else []))
