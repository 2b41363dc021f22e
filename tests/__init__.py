"""The tests of kvlink; they mirror the package."""
