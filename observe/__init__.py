"""What a run shows and records: throughput, MFU, memory, metrics, events, summary, profiler, text samples."""
