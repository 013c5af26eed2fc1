#!/bin/bash
for name in src tests docs; do
    file=/workdir/project/$name/README.md
    if [ ! -f "$file" ] || [ -s "$file" ]; then
        echo 0 > /logs/verifier/reward.txt
        exit
    fi
done
echo 1 > /logs/verifier/reward.txt
