import sys
from pathlib import Path

scores = Path("/workdir/sorted.txt")
expected = ["emil 112", "bela 104", "ada 91", "dora 77", "finn 9", "cleo 8"]
sys.exit(not (scores.is_file() and scores.read_text().splitlines() == expected))
