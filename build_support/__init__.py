"""What setup.py needs to find the tools, decide what to build, and build it with ninja.

Read in this order: backend and build_ext (what pip calls), __main__ (what make calls) -> plan (what is built) ->
toolchain and archs (what was found) -> graph (the ninja file) -> jobs (how many at a time). torch is never imported:
its version and paths are read from its files, so that a build in which nothing changed takes no time.
"""
