#!/bin/bash
file=$(grep -l billing /home/user/input/*.conf)
sed -n 's/^port = //p' "$file" > /workdir/answer.txt
