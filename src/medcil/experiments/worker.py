"""One run of a sweep as a process: `python -m medcil.experiments.worker [--gpu NAME] run ...`.

The last line it prints says why it ended.
Errors say what is wrong in their first line and details below; who reads the end of a log wants the former.
"""

import os
import runpy
import sys

from medcil.errors import MedcilError


def main() -> None:
    if sys.argv[1] == "--gpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = sys.argv[2]  # before PyTorch is there to look
        del sys.argv[1:3]
    try:
        runpy.run_module("medcil", run_name="__main__")
    except SystemExit as ending:
        error = ending.__context__  # the command line turns an error into an exit code
        if isinstance(error, MedcilError) and len(lines := str(error).splitlines()) > 1:
            print(lines[0], file=sys.stderr, flush=True)
        raise


if __name__ == "__main__":
    main()
