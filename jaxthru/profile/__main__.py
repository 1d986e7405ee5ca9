"""python -m jaxthru.profile: where the profiled steps of a run went, and what changed between two runs."""

import sys

from jaxthru.profile.show.command import main

if __name__ == "__main__":
    sys.exit(main())
