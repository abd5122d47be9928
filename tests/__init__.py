"""Tests; a package, so that tests/reports is never taken for the package reports."""
