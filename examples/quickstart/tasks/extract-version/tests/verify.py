import sys
from pathlib import Path

answer = Path("/workdir/answer.txt")
sys.exit(not (answer.is_file() and answer.read_text().strip().strip('"') == "1.34.2"))
