"""`python -m compiled_adv`: the command line."""

from compiled_adv.cli import main

if __name__ == "__main__":
    main()
