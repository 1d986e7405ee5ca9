"""python -m jaxthru.compare: the losses of several runs in one table and on one page.

`jaxthru.compare`, the function, is of two profiled runs (jaxthru/profile/show/notebook.py).
"""

import sys

from jaxthru.training.curves import main

if __name__ == "__main__":
    sys.exit(main())
