#!/bin/bash
for name in src tests docs; do
    mkdir -p /workdir/project/$name
    touch /workdir/project/$name/README.md
done
