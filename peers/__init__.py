"""Own compact versions of the networks that we compare with, and one trainer for them. Not part of the wheel."""
