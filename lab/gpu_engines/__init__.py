"""``check-gpu-engines``: real vLLM engines on a bare GPU machine, 1P1D beside one plain engine.

What belongs here: what travels there, also for ``lab.gpu`` (``pack``, ``site``, ``cubins``), and what runs there: the
command itself (``__main__``), the engines it starts (``services``), what clients see of them (``clients``), and its parts
(``equal``, ``times``, ``where``, ``leaving``). ``figures`` is pure. The machine has no package registry and no vLLM, so
nothing here imports anything but the standard library, and the checks need nothing of the tests.
"""
