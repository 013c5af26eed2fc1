#!/bin/bash
sed -n 's/.*"tar", "version": "\(.*\)".*/\1/p' /home/user/input/lock.json > /workdir/answer.txt
