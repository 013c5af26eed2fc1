#!/bin/bash
if [ "$(sh /workdir/greet.sh)" = "hello world" ] && grep -q '^name=world$' /workdir/greet.sh; then
    echo 1 > /logs/verifier/reward.txt
else
    echo 0 > /logs/verifier/reward.txt
fi
