"""memplan in other libraries' training loops: a module or package each.

They are imported as `memplan.integrations.NAME`, and use public names of memplan only. Importing memplan imports none
of them, and none imports another.
"""
