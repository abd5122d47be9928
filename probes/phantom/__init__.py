"""A phantom GPU: any program runs on it unmodified, every allocation is followed, and nothing is computed.

What would be a CUDA tensor is a meta tensor that says it is on `cuda:0`. `card` says which GPU it pretends to be,
`claims` holds which storage claims which device, `values` what is known of integers and masks, `mode` sees every
operator, `methods`, `cuda` and `libraries` answer where C++ would have asked a driver, `loading` builds models without
weights, `origins` says whose bytes they are. `boot` puts it into a process before the program starts; `runner` starts
that process and reads its answer (neither needs torch to be imported).
"""
