#!/bin/bash
sort -k2 -nr /home/user/input/scores.txt > /workdir/sorted.txt
