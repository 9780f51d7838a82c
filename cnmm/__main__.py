"""`python -m cnmm` is `cnmm`."""

import sys

from cnmm.cli import main

sys.exit(main())
