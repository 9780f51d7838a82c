"""`python -m cnmm` is `cnmm`."""

import sys

from cnmm.cli.main import main

sys.exit(main())
