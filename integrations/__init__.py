"""memplan at home in other libraries' training loops: a module or package each,
imported as `memplan.integrations.NAME`.

They use public names of memplan only. Importing memplan imports none of them, and none imports another.
"""
