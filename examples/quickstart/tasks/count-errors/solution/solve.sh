#!/bin/bash
grep -c ERROR /home/user/input/app.log > /workdir/answer.txt
