"""Break the product on purpose, and say whether its tests notice.

Belongs here: the table of laws (``laws.toml``) with its runner, places drawn at random (from cosmic-ray's operators, or
from comparisons and ``and``/``or`` alone), and what both share: functions by qualified name, copies of the tree, the choice
of tests, and verdicts. Does not belong here: the tests of laws (``tests``), and when all of this runs (the Makefile).

Nothing here changes the working tree: code is broken in a copy.
"""
