#!/bin/bash
sh /home/user/input/selfcheck.sh
echo $? > /workdir/answer.txt
