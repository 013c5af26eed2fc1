#!/bin/bash
cd /workdir/notes
for file in *.txt; do
    mv "$file" "${file%.txt}.md"
done
