"""What setup.py needs to find the tools, decide what to build, and build it with ninja.

Read backend (pip) and __main__ (make), then build, plan, toolchain, archs, graph, jobs. torch is never imported: its
version is read from its files, so that a build in which nothing changed takes no time.
"""
