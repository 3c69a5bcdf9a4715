"""Who runs in a step: `scheduler` decides, `policy` orders. Standard library only."""
