"""What measures and tries xpyd beyond its tests: benches, campaigns, checks of GPUs, and a Kubernetes of this host.

    python -m lab --list

Nothing of it is shipped, and neither package imports it. ``catalog`` has a row for each command, ``extras`` what some need
installed beside the environment of ``make setup``. Figures go into bench/results, and bench/README.md explains them.
"""
