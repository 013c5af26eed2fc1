echo "checking 3 disks"
echo "disk 2 does not answer" >&2
exit $((3 * 7 + 2))
