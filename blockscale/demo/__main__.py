"""`python -m blockscale.demo`: check that the console packages are there, then run the demo."""

import sys

from .files import PrerequisiteError, need_modules

if __name__ == "__main__":
    try:
        need_modules("click", "rich")
    except PrerequisiteError as error:
        sys.exit(f"Error: {error}")
    from .command import main

    main(prog_name="python -m blockscale.demo")
