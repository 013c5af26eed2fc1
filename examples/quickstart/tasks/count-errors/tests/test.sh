#!/bin/bash
if [ "$(tr -d '[:space:]' < /workdir/answer.txt)" = 6 ]; then
    echo 1 > /logs/verifier/reward.txt
else
    echo 0 > /logs/verifier/reward.txt
fi
