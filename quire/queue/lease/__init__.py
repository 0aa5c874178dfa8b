"""How a claim is kept, given back, or taken over; and what moves by its time."""
