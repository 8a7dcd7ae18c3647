"""The command line, a file a command. ``striate --help`` is the way in; see app.py."""
