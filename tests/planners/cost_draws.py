"""What passes may cost, drawn by hypothesis."""

from hypothesis import strategies as st

from offspec_planners.cost import PassCosts

SECONDS = st.floats(0.0, 2.0)
COSTS = st.builds(
    lambda base, row, step, node, start, link, rest: PassCosts(
        compute=((1, base + row), (1001, base + 1001 * row)),
        step=((1, step), (65, step + 64 * node)),
        start=start,
        link=link,
        rest=rest * link,
    ),
    base=st.floats(0.01, 1.0),
    row=st.floats(0.0, 0.02),
    step=st.floats(0.001, 0.2),
    node=st.floats(0.0, 0.01),
    start=SECONDS,
    link=SECONDS,
    rest=st.floats(0.0, 1.0),
)
