import sys
from pathlib import Path

expected = {"monday.md": "water the plants\n", "tuesday.md": "call the bank\n", "plan.md": "one note a day\n"}
sys.exit({file.name: file.read_text() for file in Path("/workdir/notes").iterdir()} != expected)
