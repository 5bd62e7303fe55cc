"""Probes of the graders, each of which shows a fault in every run that a plain test shows by chance only.

``triton_launch`` launches a Triton kernel and watches its loads and stores: ``Guarded`` inputs, ``unwritten``
outputs, ``launch``. ``lockstep`` runs a numba kernel one thread at a time: ``run_in_lockstep``. ``single``
has float32 numbers that cannot become float64, ``fake_device`` a device with a clock of its own, for
benchmarks, and ``returned`` functions whose result has the expected type.
"""
