"""Patch sets: small, verified changes to installed packages that job steps need, applied to a copy for one job alone.

A set is a folder with `set.json` (what, why, for which versions, proved how), unified diffs and added files. It is never
applied on trust: the original file's sha256 must match, and probes of the partner package's real signatures must hold.

Standard library only: this runs under the interpreter of the job's steps, before anything heavy is imported.
    sets.py     what a set is, and where sets are found
    diff.py     applies a unified diff exactly or not at all
    probe.py    reads signatures from source files, without importing them
    judge.py    which sets suit an installation
    overlay.py  the patched copy: real directories, links to unchanged files, real files where patched
    inplace.py  the same changes in site-packages, with backup and revert
"""
