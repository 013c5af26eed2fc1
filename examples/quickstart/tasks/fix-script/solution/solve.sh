#!/bin/bash
sed -i s/ehco/echo/ /workdir/greet.sh
