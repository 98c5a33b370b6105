"""Command lines: `hpcray` (`__main__`, `observe`) and `hpcray-launch` (`launch`)."""
