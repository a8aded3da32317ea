"""Damage to the staged run, through the command line: each damage that has an effect must be seen.

::

    pairs.py     (setting, damage) pairs: the table of the tests
    settings.py  the command lines of a setting, and the folder that its first command prepares
    running.py   one pair: a process, the damage, its exit code, and the mark of a damage that ran
    damages/     what a damage changes, by the part of the runtime
    switched.py  the comparisons of the product, each with how it is switched off
    installing.py, hook/   replace functions of the runtime in a process, when their module is imported

The plain loop is never damaged, except by the damages of what both share.
"""
