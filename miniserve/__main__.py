"""`python -m miniserve`."""

from __future__ import annotations

import sys

from miniserve.cli import main

sys.exit(main())
