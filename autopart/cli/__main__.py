"""`python -m autopart.cli`."""

import sys

from autopart.cli import main

sys.exit(main())
