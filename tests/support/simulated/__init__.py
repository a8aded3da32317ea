"""A simulated CUDA for the tests: four devices in a build of torch without CUDA, whose kernels are the CPU's.

A process that starts with ``environment()`` has them as soon as it imports torch, and so have the processes that it
starts. Memory is the host's, accounted per device and process; every operation is synchronous. Collectives on tensors
of the devices raise an error.
"""
