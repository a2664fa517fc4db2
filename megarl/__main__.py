"""`python -m megarl`, which is what torchrun starts."""

from megarl.cli import main

if __name__ == "__main__":
    main()
