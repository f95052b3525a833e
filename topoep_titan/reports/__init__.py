"""Results of runs (JSON) -> tables, figures and one self-contained page."""
