"""What a client and a store say to each other. Data only: nothing here acts."""
