"""Whether a Ray cluster has come up, without joining it:

    python -m megarl.apps.launch.ray_nodes HOST:PORT NUMBER

exits with 0 if its head answers and at least NUMBER nodes are alive, else with 1.
"""

from __future__ import annotations

import sys


def main(address: str, number: int) -> int:
    """See the module."""
    from ray._raylet import GcsClient  # pyright: ignore[reportAttributeAccessIssue]

    try:
        nodes = GcsClient(address=address).get_all_node_info(timeout=10)
    except Exception as error:
        print(error, file=sys.stderr)
        return 1
    alive = sum(node.state == 0 for node in nodes.values())  # GcsNodeInfo.ALIVE
    return 0 if alive >= number else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2])))
