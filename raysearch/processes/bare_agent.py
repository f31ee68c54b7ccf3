"""Ray's agent of a node without what it would serve: started by its path, in place of Ray's own.

As that of a Ray installed without a dashboard it serves nothing, but first imports all that it could, for two seconds.
"""

from __future__ import annotations

import runpy
import sys

if __name__ == "__main__":
    del sys.path[0]  # this folder, whose modules are not meant to be found so
    import ray.dashboard.modules

    ray.dashboard.modules.__path__ = []
    runpy.run_module("ray.dashboard.agent", run_name="__main__", alter_sys=True)
