"""`python -m megarl.parallel.torchrun ARGUMENTS`: torchrun, ending with the exit code of the rank
that failed first. torchrun's own is 1 whatever happened.
"""

from __future__ import annotations

import sys

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main


def run(arguments: list[str]) -> int:
    """Start the ranks and wait for them; returns their exit code. If a signal ended a rank or this
    process, returns 128 + the signal's number.
    """
    try:
        main(arguments)
    except ChildFailedError as error:
        code = error.get_first_failure()[1].exitcode
        return code if code > 0 else 128 - code
    except SignalException as error:
        return 128 + error.sigval
    return 0


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
