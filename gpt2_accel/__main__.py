"""Runs the console command `gpt2-accel` as `python -m gpt2_accel`."""

from gpt2_accel.cli.command import main

if __name__ == "__main__":
    main()
