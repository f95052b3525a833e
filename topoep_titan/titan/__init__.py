"""Our stand on torchtitan: recipes, trainer, routed experts, data, metrics, the CPU as a device.

Call ``device.install()`` before anything else of torchtitan is imported.
"""
