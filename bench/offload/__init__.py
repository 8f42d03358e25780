"""A streamed model under a memory limit, with speculation off and on."""
