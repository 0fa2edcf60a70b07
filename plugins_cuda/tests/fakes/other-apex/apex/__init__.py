"""Stand-in for apex 0.9.10 of the registry, a package for web sites; it must not be imported."""

raise AssertionError("another package of the name was imported")
